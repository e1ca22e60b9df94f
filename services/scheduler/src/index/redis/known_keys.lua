-- KEYS[1] meta  [2] key logs
-- ARGV[1] prefix of other keys
-- An owner, which asks every few seconds, also notes that it uses the shard. A full Redis never refuses HDEL, and refuses no write of a script that has
-- already written.
-- Returns the approximate number of idempotency keys, from the lengths of their logs. Of more than 1000 logs, 1000 are counted.
if owner ~= '' and known[2] then
  redis.call('HDEL', KEYS[1], '')
  redis.call('HSET', KEYS[1], 'seen', seconds())
end
local logs = redis.call('SRANDMEMBER', KEYS[2], 1000)
local bytes = 0
for _, log in ipairs(logs) do
  bytes = bytes + redis.call('STRLEN', ARGV[1] .. 'idemlog:' .. log)
end
if bytes == 0 then
  return {0}
end
return {math.floor(bytes / 16 * redis.call('SCARD', KEYS[2]) / #logs + 0.5)}
