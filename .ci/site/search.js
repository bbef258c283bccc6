// The search takes each word for the beginning of others: "to" would find tokens. So the
// small words of a question are left out of what it is asked.
const small = new Set(
  "a an and are at can do does for from how i in is it my of on or the to what when where which with".split(" "),
);
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  if (message.type === 2) {
    const words = message.data.split(/\s+/).filter((word) => !small.has(word.toLowerCase()));
    message = { ...message, data: words.join(" ") };
  }
  return post.call(this, message, ...rest);
};
